"""What a person sees of a run: its records, and the console, picture, summary and W&B run made from them."""
