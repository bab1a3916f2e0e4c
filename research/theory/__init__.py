"""What can be computed of the method: closed forms, their checks by simulation, and figures.

``python -m research.theory`` draws the figures of docs/theory.md. Each file is one claim: ``collinear``,
``positive``, ``gain`` and ``horizon``.
"""
