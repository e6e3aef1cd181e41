"""Random modules and random programs, run on the engine and on a plain reference, compared after every action.

``programs`` says what a program is and draws one from a seed; ``modules`` builds its module; ``actions`` runs an action
on either side (``sides``); ``runner`` compares the two; ``shrinker`` finds the smallest program that still differs;
``mutants`` break the engine on purpose. ``python -m tests.fuzz --seed 7 --world 2`` runs one seed and shrinks it.
"""
