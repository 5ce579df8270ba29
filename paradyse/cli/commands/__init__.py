"""One file for each command of the command line.

``run_<command>(args)`` is given the flags and returns the exit code. It raises ``ValueError`` where
a flag is wrong or transformers is missing, and ``launch.RanksFailed`` where a rank failed.
"""
