"""Processes of one deployment on one machine: started, watched, restarted, re-adopted."""
