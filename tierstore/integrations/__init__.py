"""Stores in the loops of other libraries; each module imports its library when it is imported.

    from tierstore.integrations.lightning import StoreCallback
    from tierstore.integrations.accelerate import register
    from tierstore.integrations.transformers import StoreCallback
    from tierstore.integrations.checkpoint import StoreState
    from tierstore.integrations.geometric import TableFeatures
    from tierstore.integrations.graphbolt import TableFeature

Those of trainers commit the store before the state of a module is taken, so that the state points
to a version that has its rows, and keep that version by the name of the checkpoint.
"""
