"""The Executable that a training script holds: the phases of a step, and recovery when ranks are lost or join."""
