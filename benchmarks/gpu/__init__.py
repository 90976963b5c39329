"""The first minutes on a machine with one GPU: is everything right, and how fast is it?"""
