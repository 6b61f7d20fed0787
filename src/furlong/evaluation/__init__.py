"""Encoder in, numbers out: one class per protocol, for any module, federated or not.

================  ==================================================================================
``knn``           is an image near others of its class? No training.
``linear``        can a linear classifier on frozen features tell the classes apart?
``linear-10``     the same with 10 % of the labels
``linear-crops``  the same as ``linear``, with new random crops of the images in every epoch
``semi-10``       how far do 10 % of the labels go, all in one place?
``transfer``      does the encoder help on another data set?
``quality``       alignment, uniformity, effective rank: without any label
================  ==================================================================================

A protocol (``protocol.Protocol``) measures an encoder with images (``protocol.Encoded``) and leaves
the encoder as it was. The functions behind the protocols work on plain tensors and image sets:
``features.features``, ``metrics.grade``, ``knn.knn``, ``linear.linear_probe``,
``tuning.fine_tune``, ``quality.quality``, ``angles.angles``.
"""
