"""Integrations with other libraries; importing a module imports its library.

    from tierstore.integrations.lightning import StoreCallback
    from tierstore.integrations.accelerate import register
    from tierstore.integrations.transformers import StoreCallback
    from tierstore.integrations.checkpoint import StoreState
    from tierstore.integrations.geometric import TableFeatures
    from tierstore.integrations.graphbolt import TableFeature

The integrations of trainers commit the store before the state of a module is taken, so that the
state points to a version with its rows, and keep that version under the name of the checkpoint.
"""
