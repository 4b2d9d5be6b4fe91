"""How is flopmeter put into a loop that somebody else wrote? One file in this folder per kind of loop.

A file carries the import name of the framework that it serves (`transformers`, `lightning`, ...), imports that
framework at its own top, and attaches a `TrainingMonitor` by the means which the framework gives. `script` is for loops
of any kind: it is what `flopmeter run` puts into an unchanged program. Files that start with `_` are parts of those.

A framework that prepares models by an object of its own (Accelerate's `Accelerator`, Lightning's `Fabric`) also has a
function `watch` in its file: `flopmeter.watch(..., accelerator=that)` finds it by the framework's name and calls it.
"""
