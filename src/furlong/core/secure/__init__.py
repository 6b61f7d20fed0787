"""Sums that the server cannot open: Bonawitz et al., CCS 2017, and Bell et al., CCS 2020.

``settings``    the section [secure] of a configuration
``primitives``  keys, masks, sealed messages, signatures and Shamir's shares
``identity``    a site's own signing key, and those of the sites that it knows
``numbers``     tensors as whole numbers modulo 2^64, and back
``graph``       who masks with whom, and how many must help to open a sum
``protocol``    what a client and the server do in each phase, on plain data

``methods/wrappers/secured.py`` carries the phases by exchanges, around any method that averages.
"""
