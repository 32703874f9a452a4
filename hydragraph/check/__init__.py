"""The check by numbers: captured graphs beside the unmodified model, on short sequences, before anything is trained."""
