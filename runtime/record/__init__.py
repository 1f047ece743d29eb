"""What is written down while a run goes on, and what does the terminal show?"""
