"""Where does each process run, who starts and restarts it, how long is it waited for?"""
