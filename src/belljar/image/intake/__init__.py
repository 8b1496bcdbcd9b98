"""How an image gets into a store: fetched, looked into, taken in, mended."""
