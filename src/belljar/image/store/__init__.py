"""Images on disk: the store, and the overlays of machines."""
