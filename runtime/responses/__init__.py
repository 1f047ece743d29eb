"""What becomes of a response: scores, samples, evaluations?"""
