"""Where does the time of a step go, by torch's profiler?

profiler_guard  may the profiler be started now, and who gives way when two want it
sampled         one real step under the profiler, split into parts
recorded        what the profiler recorded, read and split: for a live profile and for a trace file; no torch
"""
