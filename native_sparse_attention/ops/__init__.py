"""What is computed: the public operations and the backends that run them."""

import torch
from einops import rearrange

# einops enters a type into its registry when it first sees it. Were that inside of a graph that
# torch.compile traces, the graph's guard on the registry would fail at the next call.
for known in (torch.empty(0), torch.nn.Parameter(torch.empty(0))):
    rearrange(known, "n -> n")
del known
