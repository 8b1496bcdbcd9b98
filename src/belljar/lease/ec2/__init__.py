"""EC2's query API for leases: one reservation is one lease. boto3, aws cli and libcloud work with it as they are.

    request.py    a request's parameters, and who signed it
    keyring.py    access keys
    model.py      EC2's shapes, of botocore's service model
    office.py     what is written down of leases, and what the site offers
    actions/      what is done for each action; filters.py, of which things
    front.py      from a request to its answer, by HTTP as a part of the service

docs/operate/lease/ec2.md is for who uses it.
"""
