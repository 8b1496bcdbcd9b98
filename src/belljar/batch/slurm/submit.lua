-- Lua 5.1 and later. Everything a job says is a string to be compared here: none of it is run, or matched as a pattern.

local M = {}
local NO_VALUE = 4294967294 -- Slurm's NO_VAL; INFINITE is one more
local NAME = "^[%w][%w._-]*$"
local LONGEST_NAME = 100
local REFERENCE = "^docker://%w[%w._:@/-]*$"
local LONGEST_REFERENCE = 209
local SHOWN = 60
local MIB = 1048576
local LONGEST_LINE = 126 -- Linux before 5.1 drops the rest of a `#!` line in silence; with a reference or checkpoints, the node reads it from the script
local LARGEST_MANIFEST = 1048576
local KEPT = 60 -- seconds the groups of a user are remembered

local function known(number)
   return number ~= nil and number > 0 and number < NO_VALUE
end

local function plain(text)
   return (text:sub(1, SHOWN):gsub("[^%w%p ]", "?"))
end

local function refuse(...)
   slurm.log_user("%s", "belljar: " .. string.format(...))
   return nil
end

-- An image at a registry.
local function is_reference(text)
   return #text <= LONGEST_REFERENCE and text:find(REFERENCE) ~= nil
end

local function is_name(text)
   return (#text <= LONGEST_NAME and text:find(NAME) ~= nil) or is_reference(text)
end

local function may_be_pulled(image)
   if not is_reference(image) or site.pull == "any" then
      return true
   end
   local shown = {}
   for _, registry in ipairs(site.pull == "site-registries" and site.registries or {}) do
      if image:sub(10, 10 + #registry) == registry .. "/" then
         return true
      end
      shown[#shown + 1] = registry
   end
   return refuse("image %s: a job pulls images %s here. %s", image,
      #shown > 0 and ("only from " .. table.concat(shown, ", ")) or "from no registry", site.pull_hint)
end

-- What the job itself asks for: NAME of a word vm=NAME in the comment, or of a constraint vm_NAME. "" for none, nil for nonsense.
local function asked(comment, features)
   local image = ""
   for word in (comment or ""):gmatch("[^%s,;]+") do
      if word:sub(1, 3) == "vm=" then
         if image ~= "" and image ~= word:sub(4) then
            return refuse("the comment asks for more than one image")
         end
         image = word:sub(4)
         if not is_name(image) then
            return refuse("'%s' is no name of an image: letters, digits, dots, dashes and underscores, at most %d of them",
               plain(image), LONGEST_NAME)
         end
      end
   end
   for word in (features or ""):gmatch("[%w._-]+") do
      local wanted = site.features[word] or word:match("^vm_(.+)$")
      if wanted then
         if (image ~= "" and image ~= wanted) or not is_name(wanted) then
            return refuse("the constraint '%s' does not name the same image as the other constraints or the comment", plain(word))
         end
         image = wanted
      end
   end
   return image
end

-- When it asks to be checkpointed: the words behind vm-checkpoint= in the comment. "" for never, nil for nonsense.
local function checkpoint_of(comment)
   local words = ""
   for word in (comment or ""):gmatch("[^%s,;]+") do
      words = word:match("^vm%-checkpoint=(.*)$") or words
   end
   if words == "never" or words == "" then
      return ""
   end
   for part in (words .. "+"):gmatch("([^+]*)%+") do
      local digits = part:match("^every=([1-9]%d*)[smhd]?$")
      if part ~= "on-preempt" and part ~= "on-limit" and not (digits and #digits <= 8) then
         return refuse("checkpoint '%s': not when a job can be checkpointed. %s", plain(words), site.checkpoint_hint)
      end
   end
   if site.checkpoint == "never" then
      return refuse("checkpoint %s: jobs are not checkpointed here. Leave it out, or ask your site (batch.checkpoint).", plain(words))
   end
   return words
end

local function partitions_of(job, parts)
   local found = {}
   if job.partition == nil or job.partition == "" then
      for name, part in pairs(parts or {}) do
         if part.flag_default ~= nil and part.flag_default ~= 0 then
            return { name }
         end
      end
   end
   for name in (job.partition or ""):gmatch("[^,]+") do
      found[#found + 1] = name
   end
   return found
end

-- Baits' jobs get a node of their own, and are no affair of ours. nil after a word to the user: some of these partitions are baits'.
local function are_baits(names)
   local count = 0
   for _, name in ipairs(names) do
      count = count + (site.baits[name] and 1 or 0)
   end
   if count > 0 and count < #names then
      return refuse("partitions %s: some of them give a job a node of its own, some do not; ask for one kind", plain(table.concat(names, ",")))
   end
   return count > 0
end

local function image_of(partition)
   return site.queue_images[partition] or site.default_image
end

-- The image of all these partitions; nil where they differ: then the node decides, which knows where the job runs.
local function common_image(names)
   local image = #names == 0 and site.default_image or image_of(names[1])
   for _, name in ipairs(names) do
      if image_of(name) ~= image then
         return nil
      end
   end
   return image
end

local remembered = {}

-- The groups of a user by its number, which is Slurm's, not the user's. Asked for only where some rule is about groups.
local function groups_of(uid)
   local kept = remembered[uid]
   if kept and os.time() - kept.at < KEPT then
      return kept.groups
   end
   local groups = {}
   local pipe = io.popen(string.format("PATH=/usr/bin:/bin id -Gn -- %d 2>/dev/null", uid))
   if pipe then
      for name in (pipe:read("*l") or ""):gmatch("%S+") do
         groups[name] = true
      end
      pipe:close()
   end
   remembered[uid] = { at = os.time(), groups = groups }
   return groups
end

local function is_theirs(rule, job, partition)
   if rule.kind == "user" then
      return rule.name == job.user_name
   elseif rule.kind == "group" then
      return groups_of(job.user_id)[rule.name] ~= nil
   elseif rule.kind == "queue" then
      return rule.name == partition
   end
   return true
end

local function is_allowed(image, job, partition)
   local offered = {}
   for _, rule in ipairs(site.allow) do
      if is_theirs(rule, job, partition) then
         if rule.shown == "*" or (not is_reference(image) and image:find(rule.pattern)) then
            return true
         end
         offered[#offered + 1] = rule.shown
      end
   end
   local where = partition and (" in partition " .. plain(partition)) or ""
   return refuse("image %s: not allowed for %s%s. %s", image, plain(job.user_name or "you"), where,
      #offered > 0 and ("Allowed are: " .. table.concat(offered, ", ") .. ".") or "No image is allowed there.")
end

-- A store this host cannot see decides nothing: the node will.
local function is_known(image)
   local folder = not is_reference(image) and io.open(site.names, "r")
   if not folder then
      return true
   end
   folder:close()
   local entry = io.open(site.names .. "/" .. image, "r")
   if entry then
      entry:close()
      return true
   end
   return refuse("no image is called %s here", image)
end

-- The size of an image's disk in MiB; nil where its manifest cannot be read from here.
local function size_of(image)
   local file = io.open(site.names .. "/" .. image .. "/manifest.json", "r")
   local text = file and file:read(LARGEST_MANIFEST)
   if file then
      file:close()
   end
   local bytes = text and text:match('"virtual_size": *(%d+)')
   return bytes and math.ceil(tonumber(bytes) / MIB)
end

-- The disk of a machine is at least as large as its image's.
local function has_room(image, job)
   local least = not site.disk_is_scratch and known(job.pn_min_tmp_disk) and size_of(image)
   if least and job.pn_min_tmp_disk < least then
      return refuse("--tmp=%d (MiB): the disk of image %s has %d MiB already; ask for more, or leave --tmp out",
         job.pn_min_tmp_disk, image, least)
   end
   return true
end

local function is_within(what, asked_for, most, unit)
   if most > 0 and known(asked_for) and asked_for * unit > most then
      return refuse("%d %s: a job in a machine may have at most %d here", asked_for, what, math.floor(most / unit))
   end
   return true
end

local function has_right_size(job)
   if known(job.min_nodes) and job.min_nodes > 1 then
      return refuse("%d nodes: a job in a machine has one", job.min_nodes)
   end
   local cpus = known(job.min_cpus) and job.min_cpus or 1
   if known(job.cpus_per_task) and known(job.num_tasks) then
      cpus = math.max(cpus, job.cpus_per_task * job.num_tasks)
   end
   local memory = job.min_mem_per_node
   if not known(memory) and known(job.min_mem_per_cpu) then
      memory = job.min_mem_per_cpu * cpus
   end
   if not (is_within("cpus", cpus, site.max_cpus, 1) and is_within("MiB of memory", memory, site.max_memory, MIB)
      and is_within("MiB of disk", job.pn_min_tmp_disk, site.max_disk, MIB)) then
      return nil
   end
   if known(memory) and memory * MIB < site.least_memory then
      return refuse("%d MiB of memory: a job in a machine needs at least %d MiB, for the guest and for what makes it",
         memory, site.least_memory / MIB)
   end
   return true
end

local function limit_of(job, parts, names)
   if known(job.time_limit) then
      return job.time_limit
   end
   local part = #names == 1 and parts and parts[names[1]]
   if part and job.time_limit ~= NO_VALUE + 1 then
      return known(part.default_time) and part.default_time or (known(part.max_time) and part.max_time) or nil
   end
   return nil
end

local function first_line(image, checkpoint, job, parts, names)
   local words = { "#!" .. site.wrapper .. " --array=" .. (job.array_inx and "yes" or "no") }
   local minutes = limit_of(job, parts, names)
   if minutes then
      words[#words + 1] = string.format("--time=%d", minutes)
   end
   if known(job.pn_min_tmp_disk) then
      words[#words + 1] = string.format("--disk=%d", job.pn_min_tmp_disk)
   end
   if image ~= "" then
      words[#words + 1] = "--image=" .. image
   end
   if checkpoint ~= "" then
      words[#words + 1] = "--checkpoint=" .. checkpoint
   end
   return table.concat(words, " ")
end

-- A script that was fetched with `scontrol write batch_script` begins with an older line of ours.
local function without_ours(script)
   local line = script:match("^([^\n]*)\n") or ""
   local ours = "#!" .. site.wrapper .. " "
   if line:sub(1, #ours) == ours then
      return script:sub(#line + 2)
   end
   return script
end

-- What has no machine, whatever its size. *what* gets the job one: its image, or its partitions.
local function is_for_a_machine(job, script, what)
   if job.het_job_offset ~= nil and job.het_job_offset < NO_VALUE then
      return refuse("%s: a job in a machine has one part, this one is heterogeneous", what)
   elseif not script then
      local bait = next(site.baits)
      return refuse("%s: only a script of sbatch runs in a machine; once it runs,"
         .. " `srun --overlap --pty --jobid=JOB belljar exec -t slurm:JOB -- sh` is a shell in there%s", what,
         bait and ("; in partition " .. bait .. " a script has a node of its own, where srun works") or "")
   end
   for _, name in ipairs({ "tres_per_job", "tres_per_node", "tres_per_socket", "tres_per_task" }) do
      if site.gpus == 0 and (job[name] or ""):find("gpu", 1, true) then
         return refuse("%s: a machine has no GPU; ask for none, or run the job without a machine", what)
      end
   end
   return true
end

-- slurm.SUCCESS, with our line before the script of a job that is to have a machine; slurm.ERROR after a word to the user.
function M.submit(job, parts, uid)
   local script = job.script ~= nil and job.script ~= "" and without_ours(job.script)
   if script and script ~= job.script then
      job.script = script
   end
   local names = partitions_of(job, parts)
   local baits = are_baits(names)
   if baits then
      return slurm.SUCCESS
   end
   local image = asked(job.comment, job.features)
   if baits == nil or image == nil then
      return slurm.ERROR
   end
   local own = image ~= ""
   if job.container ~= nil and job.container ~= "" then
      if not own then
         return slurm.SUCCESS -- the site's own containers
      end
      refuse("a job is in a container or in a machine, not in both")
      return slurm.ERROR
   end
   if not own then
      local common = common_image(names)
      if common == "" then
         return slurm.SUCCESS
      end
      image = common or ""
   end
   if not is_for_a_machine(job, script, own and "image " .. image or "partition " .. plain(table.concat(names, ",")))
      or (image ~= "" and not (may_be_pulled(image) and is_allowed(image, job, names[1]) and is_known(image) and has_room(image, job)))
      or not has_right_size(job) then
      return slurm.ERROR
   end
   local checkpoint = checkpoint_of(job.comment)
   if checkpoint == nil then
      return slurm.ERROR
   end
   local line = first_line(own and image or "", checkpoint, job, parts, names)
   if #line > LONGEST_LINE and not is_reference(image) and checkpoint == "" then
      refuse("the name of the image is too long: %d characters do not fit here", #image)
      return slurm.ERROR
   end
   job.script = line .. "\n" .. script
   return slurm.SUCCESS
end

-- The image was settled at submission. What would have to change it is refused, except to the administrator.
function M.modify(job, record, parts, uid)
   if uid == 0 then
      return slurm.SUCCESS
   end
   local baits = are_baits(partitions_of(record, parts))
   if job.partition ~= nil and job.partition ~= "" then
      local after = are_baits(partitions_of(job, parts))
      if after ~= baits then
         if after ~= nil then
            refuse("partition %s gives jobs another environment: submit the job there", plain(job.partition))
         end
         return slurm.ERROR
      end
   end
   if baits then
      return slurm.SUCCESS
   end
   local was, is = record.comment, job.comment
   if is ~= nil then
      local before, after = asked(was, nil), asked(is, nil)
      if after == nil then
         return slurm.ERROR
      end
      local checkpoint = checkpoint_of(is)
      if checkpoint == nil then
         return slurm.ERROR
      end
      if (after ~= "" and after ~= before) or (checkpoint ~= "" and checkpoint ~= checkpoint_of(was)) then
         refuse("image and checkpoint of a job cannot be changed once it is submitted: submit it again")
         return slurm.ERROR
      end
   end
   if job.partition ~= nil and job.partition ~= "" and asked(was, record.features) == "" then
      local before, after = common_image(partitions_of(record, parts)), common_image(partitions_of(job, parts))
      if before ~= after and (before == "" or after == "") then
         refuse("partition %s gives jobs another environment: submit the job there", plain(job.partition))
         return slurm.ERROR
      end
   end
   return slurm.SUCCESS
end

return M
