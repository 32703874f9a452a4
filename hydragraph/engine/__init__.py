"""Engine: the Executable that a training script calls, the phases of a step, and recovery of lost or joining ranks."""
