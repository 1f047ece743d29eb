"""How is what a run has written shown: report.html, pictures, trackers?"""
