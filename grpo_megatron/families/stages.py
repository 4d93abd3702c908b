"""Which layers a pipeline stage holds: an even split, in megatron-core's order of virtual stages."""


def stage_layers(num_layers: int, pipeline: int, stage: int, *, virtual_pipeline: int = 1, chunk: int = 0) -> range:
    """Layers (from 0) of one model chunk. Chunk c of stage s is the (c * pipeline + s)-th run of layers.

    Example:
        >>> stage_layers(8, 2, 1), stage_layers(8, 2, 1, virtual_pipeline=2, chunk=0)
        (range(4, 8), range(2, 4))

    Raises:
        ValueError: the layers do not divide.
    """
    assert 0 <= stage < pipeline and 0 <= chunk < virtual_pipeline, (stage, pipeline, chunk, virtual_pipeline)
    num_runs = pipeline * virtual_pipeline
    if num_layers % num_runs:
        raise ValueError(
            f"parallel.pipeline: {num_layers} layers do not divide into {pipeline} stages x {virtual_pipeline} virtual "
            f"stages; use a pipeline x virtual_pipeline that divides {num_layers}"
        )
    size = num_layers // num_runs
    first = (chunk * pipeline + stage) * size
    return range(first, first + size)
