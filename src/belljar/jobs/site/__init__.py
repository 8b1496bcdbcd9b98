"""What a site asks of this host: is it fit, are its settings, and the files of belljar in its batch system."""
