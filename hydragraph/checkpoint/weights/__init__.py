"""Reading and writing of weights in Hugging Face directories."""
