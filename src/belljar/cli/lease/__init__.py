"""`belljar lease ...` and `belljar pilot`: machines of an image for so long, by the site's batch system."""
