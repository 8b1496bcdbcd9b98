"""What a space is: vacuum.toml, vacuum pipes, and the settings files of Vac."""
