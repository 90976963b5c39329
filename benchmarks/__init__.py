"""Measurements: folders by the question they answer; `lab` is shared by all."""
