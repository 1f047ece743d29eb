"""How is a run saved, and found again?"""
