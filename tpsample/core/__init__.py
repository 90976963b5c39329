"""The pieces that everything else is made of; imports nothing above it."""
