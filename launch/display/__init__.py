"""What a person sees: the terminal, report.html, pictures."""
