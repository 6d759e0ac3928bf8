"""Files of vectors: what other tools write and read, as blocks of rows.

Everything streams, in blocks of a few MiB. What a file claims is held against an allowance before
memory is taken for it, and no code that comes with a file is run.

| suffix       | read | written as                          | keys | needs   |
|--------------|------|-------------------------------------|------|---------|
| .npy         | yes  | float16 float32 float64             | no   |         |
| .npz         | yes  | float16 float32 float64             | yes  |         |
| .safetensors | yes  | float16 bfloat16 float32 float64    | yes  |         |
| .parquet     | yes  | float16 float32 float64             | yes  | pyarrow |
| .zarr        | yes  | float16 bfloat16 float32 float64    | yes  |         |
| .vec .txt    | yes  | float32 float64                     | yes  |         |
| .tsv         | yes  | float32 float64                     | yes  |         |
| .bin         | yes  | float32                             | yes  |         |
| .csv         | yes  |                                     | yes  |         |
| .pt          | yes  |                                     | yes  |         |
"""

from tierstore._formats.base import Source
from tierstore._formats.keyfile import read_keys
from tierstore._formats.keys import Keys
from tierstore._formats.registry import SINK_SUFFIXES, SOURCE_SUFFIXES, open_sink, open_source
from tierstore._formats.sink import Sink

__all__ = [
    "SINK_SUFFIXES",
    "SOURCE_SUFFIXES",
    "Keys",
    "Sink",
    "Source",
    "open_sink",
    "open_source",
    "read_keys",
]
