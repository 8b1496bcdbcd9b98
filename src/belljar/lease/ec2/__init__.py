"""EC2's query API for leases: one reservation is one lease. boto3, aws cli and libcloud work with it as they are.

query.py      a request as it came, and its parameters
signature.py  who signed it
model.py      EC2's shapes, of botocore's service model
desk.py       what the front end asks of the service
actions/      what is done for each action
front.py      from a request to its answer
server.py     by HTTP
"""
