"""What is searched next, what is trained on next: free-running, or in lockstep?"""
