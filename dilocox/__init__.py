"""dilocox: train one language model on several GPU islands, with rare low-bit exchanges between them."""
