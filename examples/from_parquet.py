"""Vectors with keys in Parquet: import them, look keys up, add new ones, export what came out."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import tierstore

rng = np.random.default_rng(0)
vectors = rng.normal(size=(1_000, 16)).astype(np.float32)
pq.write_table(
    pa.table(
        {
            "sku": [f"sku-{number}" for number in range(1_000)],
            "vector": pa.FixedSizeListArray.from_arrays(vectors.ravel(), 16),
        }
    ),
    "items.parquet",
)

done = tierstore.import_table("items.tier", "items.parquet", table="item", keys="items.parquet:sku")
print(f"{done.rows:,} rows of {done.dim}, with keys: {done.keys}")

with tierstore.open("items.tier", "r+") as store:
    item = store["item"]
    known = item.lookup(["sku-7", "sku-new"], missing=-1)
    print("rows:", known.tolist())

    store.append("item", rng.normal(size=(2, 16)).astype(np.float32), keys=["sku-new", "sku-more"])
    scores, rows = item.topk(item.read(item.lookup(["sku-new"])), 3)
    print("nearest to sku-new:", [item.keys[row] for row in rows[0].tolist()])
    tierstore.export_table(item, "out.parquet", force=True)

print(pq.read_schema("out.parquet").names, len(pq.read_table("out.parquet")))
