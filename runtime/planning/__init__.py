"""Does the run fit into this machine's memory?"""
