"""Holds what training may change of a model."""

from elastic.compat import keras_stack
from elastic.errors import UserError


class ModelState:
    """Holds what training may change of a model, and makes no steps.

    optimizer: may be None. mean: as for StepMaker.
    """

    def __init__(self, model, optimizer, mean=None):
        self.model, self.optimizer, self.mean, self.loss_scale = model, optimizer, mean, None
        # Kept because Keras takes milliseconds to collect them.
        self.variables = [keras_stack.raw(v) for v in model.trainable_variables]

    @property
    def state(self):
        """Returns the variables of model, optimizer and loss scale that an update may change."""
        of_optimizer = keras_stack.optimizer_variables(self.optimizer) if self.optimizer else []
        return self.variables + [keras_stack.raw(v) for v in of_optimizer] + (
            self.loss_scale.variables if self.loss_scale else [])

    @property
    def everything(self):
        """Returns all tf.Variables that training may change: `state`, statistics, random states."""
        found = {id(variable): variable for variable in
                 self.state + [keras_stack.raw(v) for v in self.model.variables] + self._outside()}
        return list(found.values())

    def _outside(self):
        """Returns the variables that the steps use and that are in no layer."""
        return []

    @property
    def moving(self):
        """Returns the variables of `everything` that are moving statistics which steps change."""
        return []

    def assign(self, values):
        """Assigns arrays to `everything`; raises UserError where their shapes do not fit."""
        variables = self.everything
        if [tuple(v.shape) for v in variables] != [value.shape for value in values]:
            raise UserError('the checkpoint is of another network; to start over, use --restart')
        keras_stack.assign_arrays(variables, values)
