"""An S3 server, and a proxy before it that counts requests and makes faults."""
