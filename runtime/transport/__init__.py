"""What do the processes of a run share, beside the weights?"""
