-- Made by `belljar batch install slurm`.
-- plugin @digest@
local belljar = dofile(@plugin@)

function slurm_job_submit(job_desc, part_list, submit_uid)
   return belljar.submit(job_desc, part_list, submit_uid)
end

function slurm_job_modify(job_desc, job_rec, part_list, modify_uid)
   return belljar.modify(job_desc, job_rec, part_list, modify_uid)
end

return slurm.SUCCESS
