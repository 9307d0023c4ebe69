-- Finds our snapshots whose name begins with a prefix, in some datasets, or in all below one.
local args = ...
local found = {}

local function add(snapshot)
    local held = false
    for tag in zfs.list.holds(snapshot) do
        held = held or tag == "crab"
    end
    -- A property of the snapshot itself, and not one of its dataset.
    local artifact, source = zfs.get_prop(snapshot, "crab:artifact")
    if source == snapshot then
        found[snapshot] = {
            guid = (zfs.get_prop(snapshot, "guid")),
            made = (zfs.get_prop(snapshot, "createtxg")),
            created = (zfs.get_prop(snapshot, "creation")),
            removed = (zfs.get_prop(snapshot, "defer_destroy")),
            used = (zfs.get_prop(snapshot, "used")),
            referenced = (zfs.get_prop(snapshot, "referenced")),
            base = (zfs.get_prop(snapshot, "crab:base")),
            sandbox = (zfs.get_prop(snapshot, "crab:sandbox")),
            artifact = artifact,
            held = held,
        }
    end
end

local function look(dataset)
    for snapshot in zfs.list.snapshots(dataset) do
        local at = string.find(snapshot, "@", 1, true)
        if string.sub(snapshot, at + 1, at + #args.prefix) == args.prefix then
            add(snapshot)
        end
    end
end

local function look_below(dataset)
    look(dataset)
    for child in zfs.list.children(dataset) do
        look_below(child)
    end
end

if args.exact then
    -- First where it is likely to be.
    for dataset in pairs(args.exact) do
        local snapshot = dataset .. "@" .. args.prefix
        if zfs.exists(snapshot) then
            add(snapshot)
        end
    end
    return found
end
look_below(args.below)
return found
