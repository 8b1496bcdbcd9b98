"""EC2's query API for leases: one reservation is one lease. boto3, aws cli and libcloud work with it as they are.

    query.py      a request as it came, and its parameters
    signature.py  who signed it; limits.py, how often they may ask
    keyring.py    access keys
    model.py      EC2's shapes, of botocore's service model
    desk.py       what the front end asks of the service; office.py fulfils it by what is written down of leases
    actions/      what is done for each action; filters.py, of which things
    front.py      from a request to its answer
    server.py     by HTTP; start.py, as a part of the service

docs/lease/ec2.md is for who uses it.
"""
