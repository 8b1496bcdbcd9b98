"""Images built from the packages of a distribution."""
