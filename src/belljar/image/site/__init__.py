"""The images of a site: published, signed, trusted, synced."""
