-- What is left to do after a restore or a removal: makes the sandbox's root the head of its line, removes datasets that
-- hold nothing any more, and forgets the journal where that is asked. Each part may fail and is then left to the next
-- time. Returns what failed.
local args = ...
local failed = {}
local below = args.home .. "/"

local function note(what, name, errno)
    if errno ~= 0 then
        failed[name] = { what = what, errno = errno }
    end
    return errno == 0
end

local function last_snapshot(dataset)
    local last, at = nil, -1
    for snapshot in zfs.list.snapshots(dataset) do
        local made = zfs.get_prop(snapshot, "createtxg")
        if made >= at then
            last, at = snapshot, made
        end
    end
    return last
end

if args.live and zfs.exists(args.live) then
    -- The versions up to the restored one come back to the root, and what was the root becomes a branch.
    for _ = 1, 64 do
        local origin = zfs.get_prop(args.live, "origin")
        if not origin or string.sub(origin, 1, #below) ~= below then
            break
        end
        if not note("promote", args.live, (zfs.sync.promote(args.live))) then
            break
        end
    end
end

if zfs.exists(args.home) then
    local children = {}
    for child in zfs.list.children(args.home) do
        children[#children + 1] = child
    end
    local left = 0
    for _, child in ipairs(children) do
        local last = last_snapshot(child)
        if child == below .. "next" or string.sub(child, 1, #below + 9) == below .. "incoming-" then
            left = left + 1
        elseif last then
            left = left + 1
            if child == args.discard then
                -- Nobody needs what the branch holds beyond its versions.
                note("roll back", child, (zfs.sync.rollback(child)))
            end
        elseif not note("destroy", child, zfs.sync.destroy(child)) then
            left = left + 1
        end
    end
    if args.forget then
        note("forget", args.home, zfs.sync.inherit(args.home, "crab:restore"))
    end
    local journal, source = zfs.get_prop(args.home, "crab:restore")
    if left == 0 and not (journal and source == args.home) then
        note("destroy", args.home, zfs.sync.destroy(args.home))
    end
end
return failed
