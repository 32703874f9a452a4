"""Engine: the Executable that a training script calls, the phases of a step, and recovery if ranks are lost or join."""
