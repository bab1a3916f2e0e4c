"""What we measure the library by: peers, comparisons, the paper's ablation and its further claims.

It stands beside the library and is not part of the wheel: ``python -m research --help`` in a checkout.
"""
