//! Things by small numbers that are given again.

/// A number is a thing's from [`insert`](Self::insert) to [`remove`](Self::remove).
#[derive(Debug)]
pub(super) struct Slots<T> {
    slots: Vec<Option<T>>,
    free: Vec<usize>,
}

impl<T> Default for Slots<T> {
    fn default() -> Self {
        Self { slots: Vec::new(), free: Vec::new() }
    }
}

impl<T> Slots<T> {
    /// The number that the next thing gets.
    pub(super) fn next(&self) -> usize {
        self.free.last().copied().unwrap_or(self.slots.len())
    }

    pub(super) fn insert(&mut self, thing: T) -> usize {
        match self.free.pop() {
            Some(slot) => {
                self.slots[slot] = Some(thing);
                slot
            }
            None => {
                self.slots.push(Some(thing));
                self.slots.len() - 1
            }
        }
    }

    pub(super) fn get(&self, slot: usize) -> Option<&T> {
        self.slots.get(slot)?.as_ref()
    }

    pub(super) fn get_mut(&mut self, slot: usize) -> Option<&mut T> {
        self.slots.get_mut(slot)?.as_mut()
    }

    pub(super) fn remove(&mut self, slot: usize) -> Option<T> {
        let thing = self.slots.get_mut(slot)?.take()?;
        self.free.push(slot);
        Some(thing)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.free.len() == self.slots.len()
    }
}
