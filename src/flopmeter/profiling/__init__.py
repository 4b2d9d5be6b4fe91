"""Where does the time of a step go, by torch's profiler and by the stack of the training thread?

profiler_guard  may the profiler be started now, and who gives way when two want it; one real step under it
recorded        what the profiler recorded, read and split: for a live profile and for a trace file; no torch
frames          which lines of the loop's own code take its time
"""
