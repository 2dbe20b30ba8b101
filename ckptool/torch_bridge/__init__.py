"""
What only torch can do, and what is made of torch.

devices, values and models import torch inside their functions; the modules that load weights are made of it and are
imported when they are asked for.
"""
