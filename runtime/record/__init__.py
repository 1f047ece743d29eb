"""What is written down while a run goes on."""
