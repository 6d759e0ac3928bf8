"""A bucket of S3 in this process, for tests; skipped without `pip install --group writers`."""

from __future__ import annotations

import logging
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

__all__ = ["Bucket", "forget_connections", "serving"]


class Bucket:
    """The bucket `bucket` of a server.

    Attributes:
        env: what a process finds the server by.
        client: a client of boto3.
    """

    def __init__(self, endpoint: str) -> None:
        import boto3

        self.env = {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": "anyone",
            "AWS_SECRET_ACCESS_KEY": "anything",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        self.client: Any = boto3.client(
            "s3",
            endpoint_url=endpoint,
            aws_access_key_id="anyone",
            aws_secret_access_key="anything",
            region_name="us-east-1",
        )
        self.client.create_bucket(Bucket="bucket")

    def names(self) -> list[str]:
        """Return the names of all objects."""
        found = self.client.list_objects_v2(Bucket="bucket").get("Contents", [])
        return [each["Key"] for each in found]

    def uploads(self) -> int:
        """Return the number of uploads that are not complete."""
        return len(self.client.list_multipart_uploads(Bucket="bucket").get("Uploads", []))

    def read(self, name: str) -> bytes:
        """Return the bytes of an object."""
        data: bytes = self.client.get_object(Bucket="bucket", Key=name)["Body"].read()
        return data

    def clear(self) -> None:
        """Remove all objects."""
        for name in self.names():
            self.client.delete_object(Bucket="bucket", Key=name)

    def forget(self) -> None:
        """Forget everything, buckets too, which outlives the server in its process."""
        url = f"{self.env['AWS_ENDPOINT_URL']}/moto-api/reset"
        urllib.request.urlopen(urllib.request.Request(url, method="POST")).close()


def forget_connections() -> None:
    """Close the connections of s3fs, so that others are made, by the environment as it is then."""
    import fsspec.asyn
    import s3fs
    import zarr.core.sync

    async def close(system: Any) -> None:
        await system._s3.__aexit__(None, None, None)

    for system in s3fs.S3FileSystem._cache.values():
        if system._s3 is None:
            continue
        if system.asynchronous:
            zarr.core.sync.sync(close(system))
        else:
            fsspec.asyn.sync(system.loop, close, system)
    s3fs.S3FileSystem.clear_instance_cache()


@contextmanager
def serving() -> Iterator[Bucket]:
    """Serve a bucket; skip the test without the packages for it."""
    pytest.importorskip("s3fs")
    pytest.importorskip("boto3")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(
        ip_address="127.0.0.1", port=0, verbose=False
    )
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server.start()
    try:
        host, port = server.get_host_and_port()
        bucket = Bucket(f"http://{host}:{port}")
        try:
            yield bucket
        finally:
            bucket.forget()
    finally:
        server.stop()
        forget_connections()
