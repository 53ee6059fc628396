"""Where it runs. Engines are found by name and imported when asked for."""
